// To append to credit_table_critic.jsonnet: nine problems a table, for tasks whose answers have many different states.
{ analyzers: [table { problems: 9 } for table in super.analyzers] }
