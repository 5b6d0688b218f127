// A YAML file's content in Jsonnet's words: `key+` is merged into the object on the left, as in Jsonnet.
local merged(value) =
  if std.isArray(value) then std.map(merged, value)
  else if !std.isObject(value) then value
  else std.foldl(function(sum, key) sum + (
    if std.endsWith(key, '+') then { [std.rstripChars(key, '+')]+: merged(value[key]) }
    else { [key]: merged(value[key]) }
  ), std.objectFields(value), {});
merged
