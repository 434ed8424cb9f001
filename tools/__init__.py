"""Development tools: nothing in here ships."""
