"""Count of n-grams of texts: sequences of N words, published, counted and queried."""
