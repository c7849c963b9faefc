"""How fast a DataLoader delivers, by its settings, and which settings are enough."""
