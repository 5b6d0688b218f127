"""What other people's tools read: evaluations in Inspect's format and as Parquet, checkpoints with a model card."""
