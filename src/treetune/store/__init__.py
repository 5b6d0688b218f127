"""Files of a run: written whole or not at all, with checksums, and journals that only grow."""
