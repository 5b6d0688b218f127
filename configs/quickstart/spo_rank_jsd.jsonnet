// The quickstart with SPO towards ranks, with Jensen–Shannon divergence (configs/presets/spo_rank_jsd.jsonnet).
(import '../lib/quickstart.libsonnet').correct_paths('spo_rank_jsd', import '../presets/spo_rank_jsd.jsonnet')
