// MATH, and what is measured of its models.
(import '../tasks/math.jsonnet') + (import '../evaluations/MATH.jsonnet')
