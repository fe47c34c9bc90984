"""Named collectives: the time of negotiation, and the gradients of models in any order."""
