// The first of four choices decides, between two directions, at which the teacher guesses; what follows is chatter. Solved by one in two.
(import 'signposts_fork.jsonnet') + { task+: { rates: [0.5], options: 2 } }
