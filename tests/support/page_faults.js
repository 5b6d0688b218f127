// What `page_faults.py` asks of a page: `look` gives faults in words, `focused` what has the focus and whether that is seen.
'use strict';
const LARGE_PX = 24, LARGE_BOLD_PX = 18.66, LARGE_NEEDS = 3;  // also of signs that words stand beside (WCAG 1.4.11)

function parts(colour) {
  const numbers = (colour.match(/[\d.]+/g) || []).map(Number);
  if (colour.startsWith('color(srgb')) return [255 * numbers[0], 255 * numbers[1], 255 * numbers[2], numbers[3] ?? 1];
  return numbers.length < 3 ? [0, 0, 0, 0] : [numbers[0], numbers[1], numbers[2], numbers[3] ?? 1];
}
const over = (top, below) => [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * below[i]);
function luminance(colour) {
  const [r, g, b] = colour.map((x) => { const v = x / 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function behind(element) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(parts(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
}
function opacity(element) {
  let all = 1;
  for (let at = element; at; at = at.parentElement) all *= Number(getComputedStyle(at).opacity);
  return all;
}
const seen = (element) => element.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true });
function words(element) {
  const names = [element.tagName.toLowerCase(), element.id && `#${element.id}`, ...[...element.classList].map((one) => `.${one}`)];
  return `${names.filter(Boolean).join('')} ${JSON.stringify((element.textContent || element.value || '').trim().slice(0, 40))}`;
}

function unreadable(least) {
  const found = new Map();
  for (const element of document.body.querySelectorAll('*')) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!own || !seen(element) || element.closest('option, noscript, script, style, :disabled, .skip')) continue;
    const style = getComputedStyle(element);
    const ink = parts(element instanceof SVGElement ? style.fill : style.color);
    ink[3] *= opacity(element);
    const paper = behind(element), size = parseFloat(style.fontSize);
    const large = element.closest('[aria-hidden=true]') || size >= LARGE_PX || (size >= LARGE_BOLD_PX && Number(style.fontWeight) >= 700);
    const ratio = contrast(over(ink, paper), paper);
    const key = `${style.color} on ${paper.map(Math.round)}`;
    if (ratio < (large ? LARGE_NEEDS : least) - 0.005 && !found.has(key)) found.set(key, `contrast ${ratio.toFixed(2)} of ${words(element)}: ${key}`);
  }
  return [...found.values()];
}

function headings() {
  const levels = [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].filter(seen).map((one) => Number(one.tagName[1]));
  const found = levels.filter((one) => one === 1).length === 1 ? [] : [`${levels.filter((one) => one === 1).length} headings of the first level`];
  levels.forEach((level, i) => { if (i && level > levels[i - 1] + 1) found.push(`a heading of level ${level} follows one of level ${levels[i - 1]}`); });
  return found;
}

function nameless() {
  const found = [];
  for (const element of document.querySelectorAll('a[href], button, input:not([type=hidden]), select, textarea, summary, [role=img]')) {
    if (!seen(element)) continue;
    const label = [...(element.labels || [])].map((one) => one.textContent.trim()).join('');
    const name = element.getAttribute('aria-label') || element.getAttribute('title') || label || (element.matches('input, select, textarea') ? '' : element.textContent.trim());
    if (!name.trim()) found.push(`no name: ${words(element)}`);
  }
  return found;
}

function twice() {
  const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);
  return [...new Set(ids.filter((id, i) => ids.indexOf(id) !== i))].map((id) => `the id ${id} is there twice`);
}

function unexplained() {
  const found = [];
  for (const figure of document.querySelectorAll('[data-chart]')) {
    const chart = JSON.parse(figure.dataset.chart), caption = figure.querySelector('figcaption')?.textContent || '';
    if (chart.lines?.some((line) => line.low) && !caption.includes('band')) found.push(`a band that nobody explains: ${chart.title}`);
    if (chart.better && !/[↑↓]/.test(caption)) found.push(`which way is better isn't said: ${chart.title}`);
  }
  return found;
}

function look(least) { return [...unreadable(least), ...headings(), ...nameless(), ...twice(), ...unexplained()]; }

function focused() {
  const element = document.activeElement;
  if (!element || element === document.body) return ['', '', true];
  const all = [...document.querySelectorAll('*')], style = getComputedStyle(element), box = element.getBoundingClientRect();
  const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;
  const inside = box.width > 0 && box.height > 0 && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  return [String(all.indexOf(element)), words(element), outlined && inside];
}
