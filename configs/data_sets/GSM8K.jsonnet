// GSM8K, and what is measured of its models.
(import '../tasks/gsm8k.jsonnet') + (import '../evaluations/GSM8K.jsonnet')
