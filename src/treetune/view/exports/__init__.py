"""Writes files for other programs: evaluations as logs of Inspect and as Parquet, notes, and model cards."""
