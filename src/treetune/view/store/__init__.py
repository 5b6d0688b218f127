"""Reads experiments below folders, their numbers, their answers as columns, and data sets beside them."""

from treetune.view.store.catalogue import Store
from treetune.view.store.folders import NotThere, Run

__all__ = ["NotThere", "Run", "Store"]
