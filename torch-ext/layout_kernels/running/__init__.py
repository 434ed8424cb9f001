"""What runs in a module's place, and when its own class does."""
