"""The main job end to end: text is published, counted by shards, and read with Spark."""
