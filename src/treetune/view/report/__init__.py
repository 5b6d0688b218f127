"""The report: one HTML file about one or several experiments that needs no other file."""
