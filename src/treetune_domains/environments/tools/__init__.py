"""Tools that a policy may call between the parts of its answer."""
