// KTO with the reference point 0 (Ethayarajh et al., arXiv:2402.01306), which is APO-zero (D'Oosterlinck et al.,
// arXiv:2408.06266): each answer is compared with the reference, and not with the other answer of its pair.
(import 'dpo_positive.jsonnet') + { trainer+: { objective+: { type: 'kto' } } }
