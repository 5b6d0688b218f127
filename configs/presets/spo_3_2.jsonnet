// SPO, section 3.2: towards the likeliest token, divided by the correct answers.
(import 'spo.jsonnet')
