"""Named collectives: what negotiation takes, and the gradients of models in any order."""
