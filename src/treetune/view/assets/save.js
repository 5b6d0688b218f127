// What is on the screen, as one file that asks for nothing: the page as it stands, with its styles, fonts, scripts.
'use strict';
(() => {
  const LEADING_BREAK = 'pre, textarea';

  async function file(address) {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
    return answer;
  }
  // Line ends as a parser leaves them: hashes are of that.
  async function text(address) { return (await (await file(address)).text()).replace(/\r\n?/g, '\n'); }
  async function dataAddress(address) {
    const blob = await (await file(address)).blob();
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(blob);
    });
  }
  async function hash(words) {
    const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', new TextEncoder().encode(words)));
    return `'sha256-${btoa(String.fromCharCode(...digest))}'`;
  }
  async function style(address) {
    // Of a font's formats the first, which every browser of today reads.
    let words = (await text(address)).replace(/,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\("\w+"\)/g, '');
    for (const reference of new Set([...words.matchAll(/url\(([^)'"]+)\)/g)].map((found) => found[1]))) {
      words = words.replaceAll(`url(${reference})`, `url(${await dataAddress(new URL(reference, new URL(address, location.href)))})`);
    }
    return words;
  }
  // Of the page's own files those that what is on it needs: `data-saved` says for which elements.
  const needed = (element) => document.querySelector(element.dataset.saved || 'body') !== null;

  // What only the browser knows, as attributes.
  function controls(copy) {
    const before = document.querySelectorAll('input, select, textarea');
    copy.querySelectorAll('input, select, textarea').forEach((control, i) => {
      const now = before[i];
      if (now.matches('[type=checkbox], [type=radio]')) control.toggleAttribute('checked', now.checked);
      else if (now.matches('select')) [...control.options].forEach((option, k) => option.toggleAttribute('selected', now.options[k].selected));
      else if (now.matches('textarea')) control.textContent = now.value;
      else control.setAttribute('value', now.value);
      // Scripts of the file still do what these say; the others ask a viewer that isn't there.
      if (!('own' in now.dataset) && now.id !== 'colour') { control.disabled = true; delete control.dataset.key; }
    });
  }

  function inert(copy) {
    for (const one of copy.querySelectorAll('[data-unsaved], script, link, noscript')) one.remove();
    for (const one of copy.querySelectorAll('details:has([data-later])')) one.remove();  // nobody has asked for it
    for (const one of copy.querySelectorAll('.plot')) one.replaceChildren();  // drawn anew from the chart's data
    for (const one of copy.querySelectorAll('.formula[data-done]:not(.unread)')) {
      one.textContent = one.firstElementChild.title;
      delete one.dataset.done;
    }
    for (const one of copy.querySelectorAll('a[href]:not([href^="#"])')) { one.removeAttribute('href'); delete one.dataset.key; }
    for (const form of copy.querySelectorAll('form:not([method=dialog])')) {
      for (const name of ['action', 'method', 'data-instant']) form.removeAttribute(name);
      for (const button of form.querySelectorAll('button')) { button.disabled = true; delete button.dataset.key; }
    }
    for (const one of copy.querySelectorAll('*')) {
      one.removeAttribute('style');  // what scripts set by hand; they set it again
      for (const name of ['data-href', 'data-live', 'data-mark', 'data-kept', 'formaction']) one.removeAttribute(name);
    }
    copy.querySelector('dialog').open = false;
    // A parser drops the first line end in these.
    for (const one of copy.querySelectorAll(LEADING_BREAK)) if (one.textContent.startsWith('\n')) one.prepend('\n');
  }

  async function page(when) {
    const copy = document.documentElement.cloneNode(true);
    controls(copy);
    const head = copy.querySelector('head'), body = copy.querySelector('body');
    inert(copy);
    delete body.dataset.mark;
    const add = (place, name, words) => {
      const made = document.createElement(name);
      made.textContent = words;
      place.append(made);
      return hash(words);
    };
    const styles = [], scripts = [];
    for (const link of document.querySelectorAll('link[rel=stylesheet]')) {
      if (needed(link)) styles.push(await add(head, 'style', await style(link.getAttribute('href'))));
    }
    for (const script of document.querySelectorAll('script[data-saved]')) {
      if (needed(script)) scripts.push(await add(body, 'script', await text(script.getAttribute('src'))));
    }
    const policy = document.createElement('meta');
    policy.httpEquiv = 'Content-Security-Policy';
    policy.content = `default-src 'none'; script-src ${scripts.join(' ')}; style-src ${styles.join(' ')}; font-src data:; img-src data:; form-action 'none'; base-uri 'none'`;
    const charset = head.querySelector('meta[charset]');
    charset.after(policy);
    head.querySelector('title').textContent = `${title()} · saved ${when}`;
    body.querySelector('#saved').textContent = `saved ${when}; nothing here is live`;
    return `<!doctype html>\n${copy.outerHTML}\n`;
  }

  const runs = () => new URLSearchParams(location.search).getAll('run');
  function title() { return ['treetune', ...new Set([document.title.replace(/ · treetune$/, ''), ...runs()])].join(' · '); }

  async function save() {
    const when = `${new Date().toISOString().slice(0, 19).replace('T', ' ')} UTC`;
    const said = document.getElementById('saved');
    try {
      const made = new Blob([await page(when)], { type: 'text/html' });
      const link = document.createElement('a');
      link.href = URL.createObjectURL(made);
      link.download = `${title()} ${when}.html`.replace(/[^\w.-]+/g, '_').slice(-150);
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      said.textContent = `saved as ${link.download}`;
    } catch (error) { said.textContent = `not saved: ${error.message}`; }
    setTimeout(() => { said.textContent = ''; }, 8000);
  }
  document.getElementById('save').addEventListener('click', save);
})();
