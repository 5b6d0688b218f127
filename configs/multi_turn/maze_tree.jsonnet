// The maze, by trees of turns: two answers, each continued in two ways after its first turn, and these in two ways after
// their second. These are eight answers, as in `maze.jsonnet`, for fewer tokens.
(import 'maze.jsonnet')
+ (import '../rollouts/turn_tree.jsonnet')
+ (import '../credit/tree.jsonnet')
+ { experiment_name: 'multi_turn/maze_tree', rollout+: { samples: 2 } }
