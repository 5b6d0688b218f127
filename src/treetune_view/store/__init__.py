"""Reads experiments below folders, their numbers, their answers as columns, and data sets beside them."""

from treetune_view.store.catalogue import NotThere, Run, Store

__all__ = ["NotThere", "Run", "Store"]
