"""`treetune view` shows in a browser what experiments wrote. It only reads, and starts no run."""
