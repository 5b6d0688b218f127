// Ends a run that collapses, and keeps the last checkpoint from before.
{ diagnostics+: { on_collapse: 'stop' } }
