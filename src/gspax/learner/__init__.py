"""From rollouts to updates: minibatches, the objective, the train step, its state."""
