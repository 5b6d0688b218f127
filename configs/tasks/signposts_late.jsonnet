// The last of four choices decides, at which the teacher guesses: a late reward, for none of what came before it. The
// teacher writes as on the fork, so that one start model does for both.
(import 'signposts_fork.jsonnet') + { task+: { rule: 'last' } }
