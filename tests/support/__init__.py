"""What tests and scripts share: a model that is known exactly, runs that are struck, hostile answers."""
