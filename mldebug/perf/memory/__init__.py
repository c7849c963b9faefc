"""What takes memory: of a process at a point, of a script by phase, of a model by layer, of torch.distributed."""
