"""`treetune view`: what experiments wrote, in a browser on this machine. It reads and starts nothing."""
