"""What other people's tools read: evaluations as logs of Inspect and as Parquet, notes, model cards."""
