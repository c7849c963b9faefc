"""Reports to look at: the page for a browser and the plot."""
