"""The model runner: from a model and a policy to logits, through negotiated backends."""
