// PPO with a critic that classifies returns (HL-Gauss).
(import 'ppo.jsonnet') + { experiment_name: 'hinted_sums/ppo_hl_gauss', credit+: { critic+: { loss: { type: 'hl_gauss' } } } }
