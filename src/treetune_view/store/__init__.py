"""What the viewer reads: experiments below folders, their numbers, and their answers as columns."""

from treetune_view.store.catalogue import NotThere, Run, Store

__all__ = ["NotThere", "Run", "Store"]
