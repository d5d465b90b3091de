"""Writers of old files: they follow the formats exactly, with values of their own. Hypothesis drives them."""
