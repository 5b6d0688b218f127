"""What other people's tools read: evaluations as logs of Inspect and as Parquet, checkpoints with a card."""
