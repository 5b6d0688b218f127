"""Credit as an HTTP service for trainers on other machines and in other languages (`treetune serve_credit`).

    POST /advantages ──> the key ──> the body, JSON or Arrow ──> `choices`: are its settings allowed?
                                                                     │
           response  <──  `CreditService`: a slot with a tokenizer and a grader, `CreditAssigner`, the engine

| file | what it has |
|---|---|
| `messages.py` | the types of requests and responses, from which the OpenAPI schema is made |
| `choices.py` | refuses settings of a client that are more than plain data and names of allowed parts |
| `arrow.py` | the same requests and responses as Arrow streams |
| `service.py` | calls the library: some calls at a time, each with its deadline and its budget |
| `app.py` | routes, key, HTTP statuses, metrics |

The owner of the service chooses engine, tokenizer and grader on the command line. A client chooses only the
credit, from plain data: nothing that it sends names a file, a function or an address. The service itself
executes nothing of a request. A grader that runs programs executes the programs in answers, in its sandbox.
"""
