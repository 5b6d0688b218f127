// As lora.jsonnet, with the adapters sent to the server as they are: it holds the start model once and adds
// them itself, so that a sync moves megabytes.
(import 'lora.jsonnet') + { trainer+: { lora+: { send: 'adapters' } } }
