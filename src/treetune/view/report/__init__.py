"""The report about one or several experiments: a single HTML file that needs no other file."""
