// ThreadWeaver's group length penalty (off there): where 80 % or more of the answers to a problem are correct, up to 0.2
// less for a critical path that is 10,000 tokens or more longer than the shortest correct one.
{ shaping+: [{ type: 'group_length_penalty', threshold: 0.8, weight: 0.2, window: 10000 }] }
