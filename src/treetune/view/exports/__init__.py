"""Files for other people's tools: evaluations as logs of Inspect and as Parquet, notes, model cards."""
