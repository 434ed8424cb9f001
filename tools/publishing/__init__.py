"""The parts of `make publish`: what would change on the Hub, and changing it."""
