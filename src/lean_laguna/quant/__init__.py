"""Number formats of quantised weights: a config's word, codes, and weights kept packed."""
