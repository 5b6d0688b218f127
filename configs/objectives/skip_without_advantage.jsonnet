// No step where no group of the minibatch has spread: momentum and weight decay would move the weights.
{ trainer+: { skip_without_advantage: true } }
