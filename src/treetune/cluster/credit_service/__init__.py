"""Credit as an HTTP service for trainers on other machines and in other languages (`treetune serve_credit`).

    POST /advantages ──> the key ──> the body, JSON or Arrow ──> `choices`: are its settings allowed?
                                                                     │
             answer  <──  `CreditService`: a slot with a tokenizer and a grader, `CreditAssigner`, the engine

| file | what it has |
|---|---|
| `messages.py` | the types of requests and answers, from which the OpenAPI schema is made |
| `choices.py` | refuses settings of a client that are more than plain data and names of allowed parts |
| `arrow.py` | the same requests and answers as Arrow streams |
| `service.py` | calls the library: some calls at a time, each with its deadline and its budget |
| `app.py` | routes, key, HTTP statuses, metrics |

The owner of the service chooses engine, tokenizer and grader on the command line. A client chooses only the
credit, from plain data: nothing that it sends is executed, names a file or names an address.
"""
