"""The native CPU extension: compiling it and checking what was compiled."""
