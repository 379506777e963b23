"""How a model is spread over the ranks: one file per strategy, named as the user writes it."""
