// Four choices, each of which must be right, at signs that are equally hard. Solved by one in four; the rest is the fork's.
(import 'signposts_fork.jsonnet') + { task+: { rule: 'all', rates: [0.7] } }
