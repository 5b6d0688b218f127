"""Every module that registers parts. Importing this makes all of them known, and nothing heavy.

A new part is one file in its room and one line here.
"""

# ruff: noqa: F401

import treetune.analyzers.action_ranking
import treetune.analyzers.advantage_distribution
import treetune.analyzers.diversity
import treetune.analyzers.gradient_variance
import treetune.analyzers.kl_to_reference
import treetune.analyzers.value_accuracy
import treetune.analyzers.weight_distance
import treetune.data_pipeline.make_threads
import treetune.episode_generators.credit.gae
import treetune.episode_generators.credit.group
import treetune.episode_generators.credit.monte_carlo
import treetune.episode_generators.credit.outcome
import treetune.episode_generators.credit.rloo
import treetune.episode_generators.rollout.demonstrations
import treetune.episode_generators.rollout.single_turn
import treetune.episode_generators.rollout.until_mixed
import treetune.episode_generators.selection.all
import treetune.episode_generators.selection.correct_only
import treetune.episode_generators.selection.mixed_groups
import treetune.episode_generators.selection.preference_pairs
import treetune.episode_generators.shaping.length_penalty
import treetune.episode_generators.shaping.overlong_penalty
import treetune.episode_generators.shaping.wrong_answers
import treetune.episode_generators.threads.acceleration
import treetune.episode_generators.threads.group_length_penalty
import treetune.episode_generators.threads.monte_carlo_threads
import treetune.episode_generators.threads.numbers
import treetune.episode_generators.threads.parallel_threads
import treetune.episode_generators.threads.reference_lengths
import treetune.inference.settings
import treetune.models.sources
import treetune.runtime.base
import treetune.runtime.sinks
import treetune.tables.experiments
import treetune.tables.settings
import treetune.tasks.addition_chain
import treetune.tasks.countdown
import treetune.tasks.countdown_rows
import treetune.tasks.graders.countdown
import treetune.tasks.graders.final_answer
import treetune.tasks.graders.math
import treetune.tasks.graders.minerva
import treetune.tasks.graders.numeric
import treetune.tasks.gsm8k
import treetune.tasks.math
import treetune.tasks.multiplication
import treetune.tasks.sources
import treetune.tasks.steps.lines
import treetune.tasks.steps.math_reference
import treetune.tasks.steps.sentences
import treetune.trainers.base
import treetune.trainers.objectives.cispo
import treetune.trainers.objectives.gspo
import treetune.trainers.objectives.mle
import treetune.trainers.objectives.ppo
import treetune.trainers.objectives.preference
import treetune.trainers.objectives.spo
import treetune.trainers.reference_schedule
import treetune.trainers.schedule
