"""Word count of English text, which is published to partitioned journals."""
