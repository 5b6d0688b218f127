// What Reasoning360's DAPO scripts ran: the upper bound of the clip is the lower one, so that clip-higher is off.
{ trainer+: { objective+: { clip_high: std.get(self, 'clip_low') } } }
