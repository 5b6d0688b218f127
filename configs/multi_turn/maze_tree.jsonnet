// The maze, by trees of turns: two answers, each of which continues in two ways after its first turn, and
// each of these in two ways after its second. Up to eight answers, for fewer tokens than the eight of
// `maze.jsonnet`.
(import 'maze.jsonnet')
+ (import '../rollouts/turn_tree.jsonnet')
+ (import '../credit/tree.jsonnet')
+ { experiment_name: 'multi_turn/maze_tree', rollout+: { samples: 2 } }
