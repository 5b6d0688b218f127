"""Reads experiments below folders, their numbers, their answers as columns, and data sets beside them."""

from treetune_view.store.catalogue import Store
from treetune_view.store.folders import NotThere, Run

__all__ = ["NotThere", "Run", "Store"]
