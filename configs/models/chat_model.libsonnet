// chat_model(name, repository, template_arguments): a model that chats; problems are put into its chat template.
function(name, repository, template_arguments={})
  (import 'asked_in_chat.libsonnet')
  + (import 'pretrained.libsonnet')(name, repository, {
    chat: if template_arguments == {} then {} else { template_arguments: template_arguments },
  })
